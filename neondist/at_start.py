"""Imported before all else, which takes half a second: the `neondist` command hears signals from here on."""

from .signals import listen_in_command

listen_in_command()
