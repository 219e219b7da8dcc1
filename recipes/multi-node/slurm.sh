#!/bin/bash
# One run on several machines under SLURM: the first TRAINER_NODES of the job train on all their GPUs; each other
# machine runs an inference server. If you submit it again, it continues from the newest checkpoint in OUTPUT.
#
#   sbatch --nodes=3 recipes/multi-node/slurm.sh [RECIPE [key=value ...]]
#
# All machines must see the same files: the folder from which you submit the job (this repository with its .venv,
# unless REPOSITORY and PYTHON say otherwise), the run folder and the model. See docs/multi-node.md. Untested on GPUs.
#SBATCH --job-name=agentfactory
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# SIGTERM ten minutes before the end leaves time to finish the step and write a checkpoint
#SBATCH --signal=B:TERM@600
set -euo pipefail

export repository=${REPOSITORY:-$SLURM_SUBMIT_DIR}
export python=${PYTHON:-$repository/.venv/bin/python}
export recipe=${1:-$repository/recipes/multi-node/multi-node.yaml}
shift || true
output=${OUTPUT:-runs/multi-node}
export trainer_nodes=${TRAINER_NODES:-2}
export strategy=${STRATEGY:-fsdp2}
export processes=$((trainer_nodes * ${GPUS_PER_NODE:-8}))
export main_port=${MAIN_PORT:-29500} server_port=${SERVER_PORT:-8000}
export logs=$output-slurm/${SLURM_JOB_ID}
startup_seconds=${STARTUP_SECONDS:-1800}

fail() {
    echo "error: $1" >&2
    exit 2
}

command -v curl >/dev/null || fail "curl is not installed; this script needs it to check that a server answers"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#nodes[@]} > trainer_nodes)) || fail "the job has ${#nodes[@]} machines, and TRAINER_NODES=$trainer_nodes of them \
train: none is left to generate; fix: sbatch --nodes=$((trainer_nodes + 1)), or a lower TRAINER_NODES"
trainers=("${nodes[@]:0:trainer_nodes}")
servers=("${nodes[@]:trainer_nodes}")
export main_address=${trainers[0]}
mkdir -p "$logs"

# others may reach the servers over the network: all routes except /health require this key
AGENTFACTORY_SERVER_KEY=${AGENTFACTORY_SERVER_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export AGENTFACTORY_SERVER_KEY
# by default, torchrun kills its processes half a minute after SIGTERM; a step and a checkpoint take longer
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600

# Runs on each server machine, with the overrides of the command line.
serve_here() {
    exec "$python" -m agentfactory serve "$recipe" "$@" server.url=null server.host=0.0.0.0 \
        "server.port=$server_port" server.api_key_env=AGENTFACTORY_SERVER_KEY "output=$logs/server-$SLURM_PROCID"
}

# Runs on each trainer machine.
train_here() {
    exec "$python" -m accelerate.commands.launch --config_file "$repository/recipes/accelerate/$strategy.yaml" \
        --num_machines "$trainer_nodes" --machine_rank "$SLURM_PROCID" \
        --main_process_ip "$main_address" --main_process_port "$main_port" \
        --num_processes "$processes" "$repository/train.py" "$recipe" "$@"
}

# on_each FUNCTION NODE,NODE ARGUMENT ...: runs one task per machine; if one fails, all are stopped.
on_each() {
    local function=$1 list=$2 count
    shift 2
    count=$(tr ',' '\n' <<<"$list" | wc -l)
    exec srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$list" --kill-on-bad-exit=1 --cpu-bind=none \
        --output="$logs/$function-%t.log" bash -c "$(declare -f "$function"); $function \"\$@\"" "$function" "$@"
}

join() {
    local IFS=,
    echo "$*"
}

# check the recipe before the servers load
resolved=$("$python" -m agentfactory serve "$recipe" "$@" server.url=null "output=$logs/check" --dry-run) || exit 2
if grep -qE '^(stages:|prepare: [^n])' <<<"$resolved"; then
    fail "$recipe has several stages or a \`prepare\`, which only \`agentfactory train\` runs; fix: prepare on one machine, \
and give this script the recipe of one stage, with model.path, data.path and prepare=null"
fi

on_each serve_here "$(join "${servers[@]}")" "$@" &
serving=$!
trap 'kill -TERM "$serving" 2>/dev/null || true; wait' EXIT

urls=()
for node in "${servers[@]}"; do
    url=http://$node:$server_port
    urls+=("\"$url\"")
    until curl --silent --fail --noproxy '*' --output /dev/null "$url/health"; do
        kill -0 "$serving" 2>/dev/null || fail "a server has ended; its log: $logs/serve_here-*.log"
        ((SECONDS < startup_seconds)) ||
            fail "$url does not answer after STARTUP_SECONDS=$startup_seconds s; its log: $logs/serve_here-*.log"
        sleep 1
    done
done

resume=()
if compgen -G "$output/checkpoints/step-*" >/dev/null; then
    resume=(--resume)
fi
on_each train_here "$(join "${trainers[@]}")" "$@" "output=$output" "server.url=[$(join "${urls[@]}")]" \
    server.api_key_env=AGENTFACTORY_SERVER_KEY "train.processes=$processes" "train.strategy=$strategy" "${resume[@]}" &
training=$!
trap 'kill -TERM "$training"' TERM

# a signal ends `wait`, but not the training
while
    status=0
    wait "$training" || status=$?
    kill -0 "$training" 2>/dev/null
do :; done
echo "the trainers ended with status $status; logs: $logs; run folder: $output"
exit "$status"
