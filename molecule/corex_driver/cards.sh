#!/bin/bash
# What a box with four BI-V100 and its kernel's headers shows; the bus of a container is the host's.
set -euo pipefail
mountpoint -q /sys/bus/pci/devices || mount -t tmpfs none /sys/bus/pci/devices
for card in 0 1 2 3; do
  device="/sys/bus/pci/devices/0000:4$card:00.0"
  mkdir -p "$device"
  echo 0x1e3e > "$device/vendor"
  echo 0x0001 > "$device/device"
  echo 0x120000 > "$device/class"
done
mkdir -p "/lib/modules/$(uname -r)/build"
touch "/lib/modules/$(uname -r)/build/Makefile"
