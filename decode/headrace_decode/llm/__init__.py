"""The engine frontend that plans and checks each request before the engine gets it."""
