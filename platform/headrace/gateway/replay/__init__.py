"""A stream whose replica is lost goes on from another one, behind what the client has."""
