"""The relay of requests to replicas; another replica resumes a stream if its replica is lost."""
