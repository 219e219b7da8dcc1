#!/bin/bash
cat > /app/parser.py <<'PROGRAM'
import os


def parse(text):
    settings = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings[name.strip()] = value.strip()
    return settings


if __name__ == "__main__":
    for name, value in sorted(parse(open(os.environ["SETTINGS"]).read()).items()):
        print(name, "is", value)
PROGRAM
