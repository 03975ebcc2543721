"""What replicas of any role share as members of a Ray Serve app."""
