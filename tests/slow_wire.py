"""A slow wire carries a host's frames late, and loses some of them, without the kernel.

The kernel's own (`tc netem`) is a module that many machines lack. Both ends of this
wire are devices of this process, which hands frames from one to the other.
"""

import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time

SET_INTERFACE = 0x400454CA  # TUNSETIFF
TAP_WITHOUT_HEADER = 0x1002  # IFF_TAP, IFF_NO_PI
NEW_NET = 0x40000000  # CLONE_NEWNET
MAX_FRAME = 1 << 16


def make_end(pid, name):
  """Makes a device in a process's network namespace; the file of its frames."""
  with open(f'/proc/{pid}/ns/net') as namespace:
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NET):
      raise OSError(ctypes.get_errno(), 'setns')
  file = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
  options = struct.pack('16sH22x', name.encode(), TAP_WITHOUT_HEADER)
  fcntl.ioctl(file, SET_INTERFACE, options)
  return file


def write(file, frame):
  try:
    os.write(file, frame)
  except OSError:  # the device is down: the frame is lost, as on any wire
    return


def carry(near, far, delay, loss):
  """Carries frames until the input of this process is closed.

  Args:
    near: The host's end.
    far: The switch's.
    delay: Seconds that a frame of the host takes.
    loss: Share of the host's frames that get lost.
  """
  dice, waiting = random.Random(0), collections.deque()
  while True:
    pause = max(0, waiting[0][0] - time.monotonic()) if waiting else None
    ready, _, _ = select.select([near, far, 0], [], [], pause)
    if 0 in ready:
      return
    if near in ready and dice.random() >= loss:
      waiting.append((time.monotonic() + delay, os.read(near, MAX_FRAME)))
    elif near in ready:
      os.read(near, MAX_FRAME)
    if far in ready:
      write(near, os.read(far, MAX_FRAME))
    while waiting and waiting[0][0] <= time.monotonic():
      write(far, waiting.popleft()[1])


def main(host_pid, host_device, switch_pid, switch_device, delay, loss):
  far = make_end(switch_pid, switch_device)
  near = make_end(host_pid, host_device)
  print('ready', flush=True)
  carry(near, far, float(delay), float(loss))


if __name__ == '__main__':
  main(*sys.argv[1:])
