"""From a client's request to a replica's answer, and on from another replica if that is lost."""
