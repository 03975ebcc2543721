"""The real `headrace` command with a stand-in app, so that tests of `up` and `down` need no engine.

Run as a script with the command's arguments. `FAKE_APP=broken` makes a replica that cannot start.
Where the configuration has a key file, the gateway is the real one, over a replica that is none.
`FAKE_DRIVER=crash` has the process that deletes the app die of SIGSEGV once it is done.
"""

import os
import sys
import types
from typing import Any


def build_app(args: dict[str, Any]) -> Any:
    from ray import serve

    class Fake:
        def __init__(self, settings: dict[str, Any], mode: str) -> None:
            import http.server
            import json
            import threading
            from multiprocessing import resource_tracker, shared_memory

            if mode == "broken":
                raise RuntimeError("the engine found no sense in this")
            # What an engine that is killed leaves behind: a segment that no tracker knows.
            self.shm = shared_memory.SharedMemory(create=True, size=4096)
            resource_tracker.unregister(self.shm._name, "shared_memory")
            name = self.shm.name

            known = {"replicas": [], "plans": {"local": 3}, "nixl_bytes": 0, "shm": name}
            if settings["api_keys_file"]:
                from tests.unit.gateway_fakes import run_gateway

                threading.Thread(target=run_gateway, args=(settings, known), daemon=True).start()
                return

            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    there = self.path in ("/health", "/headrace/v1/status")
                    self.send_response(200 if there else 404)
                    self.end_headers()
                    self.wfile.write(json.dumps(known).encode())

                def log_message(self, *args: object) -> None:
                    pass

            address = (settings["host"], settings["port"])
            server = http.server.ThreadingHTTPServer(address, Handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()

        def __call__(self, request: object) -> str:
            return "fake"

    gateway = args["headrace"]["gateway"]
    deployment = serve.deployment(
        Fake, name="decode", ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=1
    )
    return deployment.bind(gateway, os.environ.get("FAKE_APP", ""))


if __name__ == "__main__":
    from headrace.cli import deploy, driver
    from headrace.cli.main import main

    if sys.argv[1] == "driver":  # the process that the command starts to talk to Ray
        module: Any = types.ModuleType("headrace.app")
        module.build_app = build_app
        sys.modules["headrace.app"] = module
        if os.environ.get("FAKE_DRIVER") == "crash" and sys.argv[2] == "delete":
            delete = driver._delete

            def delete_and_crash(*arguments: Any) -> None:
                delete(*arguments)
                os.kill(os.getpid(), 11)

            driver._delete = delete_and_crash
        driver.start(sys.argv[2])
    deploy.DRIVER[:] = [sys.executable, __file__, "driver"]
    main(sys.argv[1:])
