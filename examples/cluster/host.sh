#!/usr/bin/env bash
# Runs launch.train over several hosts. Every host runs this script:
#
#   host.sh RANK COUNT HEAD [OPTION ...]
#
# RANK is this host's number, from 0; COUNT is the number of hosts; HEAD is the name or
# address of host 0, which runs launch.train with the options. The others serve it until
# it ends, and join again if Ray has given them up. All of them need this package and the
# same shared folders. The environment may set
#
#   PYTHON             the interpreter (python)
#   RAY_PORT           where host 0 listens (6379)
#   RAY_START_OPTIONS  more options of `ray start`, such as --resources={"TPU":4}
set -euo pipefail

rank=$1 count=$2 head=$3
shift 3
python=${PYTHON:-python}
port=${RAY_PORT:-6379}
# Ray asks for this to form a cluster on macOS or Windows too.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1

# The address by which the other hosts know this one: that of the interface to HEAD.
addresses=$("$python" - "$head" "$port" <<'PYTHON'
import socket, sys, time

end = time.monotonic() + 600  # a pod's name may take a while to be known
while True:
  try:
    place = socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), type=socket.SOCK_DGRAM)[0]
    break
  except socket.gaierror:
    if time.monotonic() > end:
      raise
    time.sleep(2)
with socket.socket(place[0], socket.SOCK_DGRAM) as connection:
  connection.connect(place[4])
  print(connection.getsockname()[0], place[4][0])
PYTHON
)
read -r address head <<< "$addresses"

raylet=
stop() {
  if [[ -n $raylet ]]; then
    kill "$raylet" 2> /dev/null || true
    wait "$raylet" || true
  fi
}
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# Starts Ray, which ends with the process $raylet.
start_ray() {
  # shellcheck disable=SC2086  # several options
  "$python" -m ray.scripts.scripts start --block --disable-usage-stats \
    --node-ip-address="$address" ${RAY_START_OPTIONS:-} "$@" &
  raylet=$!
}

# 0: HEAD's Ray listens; 1: nothing does; 124: there is no answer.
ask_head() {
  timeout 5 bash -c "exec 3<> /dev/tcp/$head/$port" 2> /dev/null
}

if [[ $rank == 0 ]]; then
  start_ray --head --port="$port" --include-dashboard=false
  "$python" - "$address:$port" "$count" <<'PYTHON'
import sys, time

import ray

end = time.monotonic() + 600
while True:
  try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')
    break
  except ConnectionError:
    if time.monotonic() > end:
      raise
    time.sleep(1)
while (found := sum(node['Alive'] for node in ray.nodes())) < int(sys.argv[2]):
  if time.monotonic() > end:
    sys.exit(f'{found} of {sys.argv[2]} hosts have joined within ten minutes')
  time.sleep(1)
PYTHON
  "$python" -m launch.train --config.cluster.ray=true \
    --config.cluster.address="$address:$port" "$@" &
  run=$!
  trap 'kill -TERM $run; wait $run; exit 143' TERM  # a checkpoint, and the end
  wait "$run"
  exit
fi

refused=0 has_joined=false
while true; do
  status=0
  ask_head || status=$?
  if ((status == 0)); then
    refused=0
    if [[ -z $raylet ]] || ! kill -0 "$raylet" 2> /dev/null; then
      start_ray --address="$head:$port"
      has_joined=true
    fi
  elif ((status == 1)) && $has_joined && ((++refused >= 3)); then
    exit 0  # the run has ended
  fi
  sleep 2
done
