"""The log of all processes: one line an event on standard error, as text or as JSON.

Called once by each process, as soon as it has its settings; everybody else uses `logging.getLogger("gateway...")`.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from gateway.settings import Front, LogFormat


class _Text(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03d"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s UTC {process} %(levelname)s %(message)s")


class _Json(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(front: Front, process: str) -> None:
    """Send the log of this process to standard error, in the settings' format and from their level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if front.log_format is LogFormat.JSON else _Text(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(front.log_level.value.upper())
