"""`python -m shadowkv_lab` is `shadowkv`."""

from shadowkv_lab.cli import main

main()
