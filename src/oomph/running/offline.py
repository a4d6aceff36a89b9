"""What the environment says inside, so that libraries do not wait for a network that is not there.

The network namespace is what keeps them off it; these only spare the time of trying.
"""

from __future__ import annotations

import os
import sys
import tempfile

# Each is read by the library that it is named for, as its documentation says.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "1",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "DVC_NO_ANALYTICS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# They lead to services outside: a tracking server, the agent that holds the user's keys.
UNSET = ("MLFLOW_TRACKING_URI", "SSH_AUTH_SOCK", "DOCKER_HOST", "DBUS_SESSION_BUS_ADDRESS")


def go_offline(temporary: str | None = None) -> None:
    """Change this process's environment. For the child inside; never for the user's process."""
    os.environ.update(OFFLINE)
    for name in UNSET:
        os.environ.pop(name, None)
    sys.dont_write_bytecode = True
    if temporary is not None:
        os.environ["TMPDIR"] = temporary
        tempfile.tempdir = None  # it was looked up outside
