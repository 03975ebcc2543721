"""The `headrace` command: `app` is its entry point, and each command imports what it needs."""


def app() -> None:
    """Run the command line."""
    from headrace.cli.main import main

    main()
