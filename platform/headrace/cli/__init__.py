"""The `headrace` command. `app` is the entry point; each command imports only what it needs."""


def app() -> None:
    """Run the command line."""
    from headrace.cli.main import main

    main()
