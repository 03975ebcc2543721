"""TLS whose files may be replaced while the server runs.

Each new connection uses the present content of the files; existing connections stay as they are.
The files are checked when a client connects, at most once a second. If the files cannot be used, or
are half written, the old content stays in use, the log says why, and the files are tried again.
"""

from __future__ import annotations

import logging
import ssl
import time
from typing import Any

from headrace.config.file_stamp import ReloadSchedule
from headrace.config.tls_files import TlsFiles

logger = logging.getLogger("headrace.gateway")

CHECK_INTERVAL_S = 1.0


class ReloadingContext(ssl.SSLContext):
    """A server's context that hands each connection to a context made from the files' content.

    asyncio and uvloop call `wrap_bio` once for each connection.

    Args:
        files: the files to read.

    Raises:
        ValueError: the files cannot be used.
    """

    def __new__(cls, *_: Any, **__: Any) -> ReloadingContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._reload = ReloadSchedule(files.stamp(), time.monotonic)
        self._current = files.context()
        self._next_check_s = time.monotonic() + CHECK_INTERVAL_S

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Run `ssl.SSLContext.wrap_bio` with the files' present content."""
        self._reload_if_due()
        return self._current.wrap_bio(*args, **kwargs)

    def _reload_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        stamp = self._files.stamp()
        if not self._reload.is_due(stamp):
            return
        try:
            self._current = self._files.context()
        except ValueError as error:
            self._reload.record_failure(stamp)
            logger.error("the TLS files stay as they were: %s", error)
        else:
            self._reload.record_success(stamp)
            logger.info("read the certificate %s", self._files.cert)
