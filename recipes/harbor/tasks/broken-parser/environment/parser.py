"""Prints the settings in the file that SETTINGS names as `name is value`, sorted by name."""

import os
from pathlib import Path


def parse(text):
    settings = {}
    for line in text.split("\n"):
        name, value = line.split("=")
        settings[name] = value
    return settings


if __name__ == "__main__":
    for name, value in sorted(parse(Path(os.environ["SETTINGS"]).read_text()).items()):
        print(name, "is", value)
