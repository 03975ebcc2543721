"""`headrace config`: writes, checks, compares and prints configurations."""
