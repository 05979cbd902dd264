"""`python -m service.engine`: the engine process. The supervisor starts it and writes its ProcessConfig to standard input."""

from __future__ import annotations

import gc

from service.ipc.process_config import ProcessConfig


def main() -> None:
    """Import the engine, and run it. From its first moment this process ends with its supervisor: the import takes a second or two."""
    config = ProcessConfig.read()
    # The import creates hundreds of thousands of objects, and no garbage: collections would take an eighth of the start.
    gc.disable()
    from service.engine.start import run

    gc.enable()
    run(config)


if __name__ == "__main__":
    main()
