"""Parts that replicas of both roles share as members of a Ray Serve app."""
