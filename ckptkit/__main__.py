"""python -m ckptkit."""

from .cli import main

main()
