"""The options that commands share, the completion of their values, and the parser."""
