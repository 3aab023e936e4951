"""Imported before all else, which takes half a second: a command hears signals, and a rank is supervised."""

import os

from .heartbeat import connect
from .signals import listen_in_command

connect(os.environ)
listen_in_command()
