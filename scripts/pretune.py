#!/usr/bin/env python3
"""Tune this GPU ahead of time: the same as `tunedqk pretune`."""

import sys

from tunedqk.cli import main

if __name__ == "__main__":
    sys.exit(main(["pretune", *sys.argv[1:]]))
