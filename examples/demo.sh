#!/bin/sh
# From nothing to a trained GPT-2-124M step, on eight CPU devices that share this machine. Run by `make demo`.
#
# Every command is printed before it runs and can be typed as it is printed, from the top folder of the project with
# .venv/bin on the PATH. What it writes lies in .demo/.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .demo

# Large memory pages: without them every step pays for mapping its buffers again, which no measurement of single ops sees.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1

MODEL='gpt2(dtype=float32,seq=128)' # bfloat16 is no faster on a CPU, and in float32 the comparison is close
CLUSTER=examples/clusters/cpu8.toml

say() { printf '\n--- %s\n' "$*"; }
run() {
    printf '$'
    for word in "$@"; do
        case $word in *[\(\)\ ]*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    "$@"
}

say 'What do eight CPU devices of this machine achieve when they work at the same time? (about a minute)'
run meshplan profile --fake-devices 8 --budget 60s --model "$MODEL" -o .demo/cpu.profile.json

say 'Search the best plan for a step of 8 examples, from the profile.'
run meshplan plan --model "$MODEL" --cluster "$CLUSTER" --global-batch 8 --profile .demo/cpu.profile.json \
    -o .demo/gpt2.plan.json

say 'What the plan does, what it costs, and how good it is proven to be.'
run meshplan explain .demo/gpt2.plan.json

say 'What a CI job runs: is the plan sound, and does it fit the cluster?'
run meshplan validate .demo/gpt2.plan.json --cluster "$CLUSTER"

say 'Train a few steps with it; then the same steps on one device, which must give the same losses and parameters.'
run meshplan run .demo/gpt2.plan.json --steps 4 --compare

say 'Done: the plan is .demo/gpt2.plan.json, the profile .demo/cpu.profile.json.'
