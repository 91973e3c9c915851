#!/usr/bin/env bash
# Everything that only a GPU can show, on a machine with one NVIDIA card; nothing is downloaded.
#
#     benchmarks/gpu.sh checks [STEP ...]     correctness                 about 9 minutes, never more than 9.5
#     benchmarks/gpu.sh speed [STEP ...]      times, profile, memory      about 9 minutes, never more than 9.5
#     benchmarks/gpu.sh --dry-run             both, small and on the CPU  about 3 minutes on 2 idle cores
#
# Steps have a time limit each and go on after a failure. Without STEP all are run; with it, only those (by the names
# that the summary shows), so that a later call can repeat what failed or was NOT RUN for want of time: compiling is last.
#
# Needs Python 3.11 or newer with torch 2.11 or newer for CUDA, and of other packages what pyproject.toml names as
# dependencies, pytest and pytest-timeout for tests/gpu. Lockstep itself need not be installed. What is missing there can
# be given as a folder of wheels:
#
#     WHEELS=dir     install these, without a network, into a temporary folder (pydantic, pydantic-core,
#                    annotated-types, typing-inspection and ruamel.yaml are what is most likely to be missing)
#     PYTHON=python3 which interpreter
#     OUT=dir        where results go; default gpu-results. At most 8 files a call: summary-*.txt has PASS, MISSED (all
#                    ran, but a goal was not met), FAIL, TIMEOUT or NOT RUN and the time for each step
#     LIMIT=570      seconds for all steps of a call
#     TMPDIR=dir     where checkpoints go, should have 20 GB
#
# Exit code: 0 if all steps passed or missed a goal, 1 otherwise.
set -u

usage() {
    sed -n '2,/^set -u/{/^#/s/^# \{0,1\}//p}' "$0"
    exit "$1"
}

IS_DRY=''
PARTS=''
STEPS=' '
for argument in "$@"; do
    case $argument in
        --dry-run) IS_DRY=yes ;;
        -h | --help) usage 0 ;;
        checks | speed) PARTS="$PARTS $argument" ;;
        -*) usage 2 >&2 ;;
        *) STEPS="$STEPS$argument " ;;
    esac
done
[ -n "$IS_DRY" ] && [ -z "$PARTS" ] && PARTS='checks speed'
[ -n "$PARTS" ] || usage 2 >&2

ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=$(command -v "${PYTHON:-python3}") || { echo "There is no Python: set PYTHON." >&2; exit 2; }
PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
OUT=${OUT:-gpu-results}
LIMIT=${LIMIT:-570}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT" "$WORK/site" "$WORK/bin"
OUT=$(cd "$OUT" && pwd)
SUMMARY=/dev/null

# Wheels, and the metadata and the command that installing Lockstep would have made.
if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$WORK/site" \
        "$WHEELS"/*.whl || echo "The wheels in $WHEELS could not be installed." >&2
fi
VERSION=$(sed -n 's/^VERSION: Final = "\(.*\)"/\1/p' "$ROOT/src/lockstep/version.py")
mkdir "$WORK/site/lockstep_ddp-$VERSION.dist-info"
printf 'Metadata-Version: 2.1\nName: lockstep-ddp\nVersion: %s\n' "$VERSION" \
    > "$WORK/site/lockstep_ddp-$VERSION.dist-info/METADATA"
printf '#!/bin/sh\nexec "%s" -c "from lockstep_command import main; main()" "$@"\n' "$PYTHON" > "$WORK/bin/lockstep"
chmod +x "$WORK/bin/lockstep"
export PATH="$WORK/bin:$PATH"
export PYTHONPATH="$ROOT/src:$ROOT/benchmarks:$WORK/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TORCHINDUCTOR_CACHE_DIR="${TMPDIR:-/tmp}/gpu-benchmarks-inductor" TORCHINDUCTOR_COMPILE_THREADS=8
SMALL=''
FEW_JOBS=''
if [ -n "$IS_DRY" ]; then
    export CUDA_VISIBLE_DEVICES=''
    SMALL=--small
    FEW_JOBS='--jobs 2'
fi

# step NAME FILE SECONDS COMMAND ...: run a command, its output into FILE, what became of it into the summary.
step() {
    local name=$1 file=$OUT/$2 own=$3 limit code result began
    shift 3
    case $STEPS in
        ' ' | *" $name "*) ;;
        *) return ;;
    esac
    limit=$((LIMIT - SECONDS))
    [ "$own" -lt "$limit" ] && limit=$own
    if [ "$limit" -lt 5 ]; then
        tell "$(printf '%-22s %-8s' "$name" 'NOT RUN')"
        return
    fi
    began=$SECONDS
    printf '\n======== %s (limit %s s): %s\n' "$name" "$limit" "$*" >> "$file"
    (cd "$ROOT" && timeout -k 5 "$limit" "$@") >> "$file" 2>&1 < /dev/null
    code=$?
    case $code in
        0) result=PASS ;;
        3) result=MISSED ;;
        124 | 137) result=TIMEOUT ;;
        *) result=FAIL ;;
    esac
    case $result in PASS | MISSED) ;; *) HAS_FAILED=yes ;; esac
    printf '======== %s: %s, exit code %s, %s s\n' "$name" "$result" "$code" "$((SECONDS - began))" >> "$file"
    tell "$(printf '%-22s %-8s %4s s   %s' "$name" "$result" "$((SECONDS - began))" "${file##*/}")"
}

tell() {
    echo "$1" | tee -a "$SUMMARY"
}

begin() {
    SUMMARY=$OUT/summary-$1.txt
    local commit
    commit=$(git -C "$ROOT" rev-parse --short HEAD 2> /dev/null)
    tell "$1${IS_DRY:+, a dry run on the CPU}, $(date -u +%Y-%m-%dT%H:%M:%SZ), commit ${commit:-unknown}"
}

# shellcheck disable=SC2016 # it is expanded by the shell that runs it
FILL_CACHE='
models=$1 python=$2 script=$3; shift 3
for model in $models; do
    for kind in "" --deterministic; do
        "$python" "$script" --fill-cache --compile $kind --models "$model" "$@" &
    done
done
wait
'
HAS_FAILED=''
B=$ROOT/benchmarks

# shellcheck disable=SC2086 # $SMALL and $FEW_JOBS are several words, or none
checks() {
    local nccl='' modes=default,reduce-overhead,max-autotune-no-cudagraphs
    [ -n "$IS_DRY" ] && modes=default
    begin checks
    step versions versions.txt 60 "$PYTHON" "$B/gpu_versions.py" $SMALL
    step nccl-ranks versions.txt 130 "$PYTHON" "$B/gpu_versions.py" --nccl $SMALL
    # Where NCCL takes several ranks on one card, they are tried too.
    if [ -z "$IS_DRY" ] && grep -q 'NCCL with 2 rank(s).*: works' "$OUT/versions.txt" 2> /dev/null; then
        nccl=yes
        grep -q 'NCCL_MULTI_RANK_GPU_ENABLE=1: works' "$OUT/versions.txt" && export NCCL_MULTI_RANK_GPU_ENABLE=1
    fi
    step streams-1 streams.txt 60 "$PYTHON" "$B/gpu_streams.py" --world 1 $SMALL
    step streams-2 streams.txt 60 "$PYTHON" "$B/gpu_streams.py" --world 2 $SMALL
    step waits waits.txt 90 "$PYTHON" "$B/gpu_waits.py" $SMALL
    step failures failures.txt 120 "$PYTHON" "$B/gpu_failures.py" --kinds exception,oom,assert ${IS_DRY:+--places backward} \
        $FEW_JOBS $SMALL
    step killed failures.txt 70 "$PYTHON" "$B/gpu_failures.py" --kinds kill --places backward $SMALL
    step killed-launch failures.txt 60 "$PYTHON" "$B/gpu_failures.py" --kinds exception,kill --launch \
        $FEW_JOBS $SMALL
    step digests digests.txt 90 "$PYTHON" "$B/gpu_digests.py" --modes eager $FEW_JOBS $SMALL
    step resume other.txt 60 "$PYTHON" "$B/gpu_checkpoints.py" --resume $SMALL
    step devices other.txt 60 "$PYTHON" "$B/gpu_busy.py"
    step tests tests.txt 200 "$PYTHON" -m pytest tests/gpu -q --durations 10
    step sanitizer streams.txt 60 "$PYTHON" "$B/gpu_streams.py" --sanitizer $SMALL
    step pause other.txt 90 "$PYTHON" "$B/gpu_checkpoints.py" ${IS_DRY:+--rounds 1} $SMALL
    step digests-compiled digests.txt 180 "$PYTHON" "$B/gpu_digests.py" \
        --modes "$modes" $FEW_JOBS $SMALL
    if [ -n "$nccl" ]; then
        step digests-nccl digests.txt 90 "$PYTHON" "$B/gpu_digests.py" --modes eager --nccl
        step failures-nccl failures.txt 120 "$PYTHON" "$B/gpu_failures.py" --backend nccl --places backward
    fi
}

# shellcheck disable=SC2086 # $SMALL and $rounds are several words, or none
speed() {
    begin speed
    local times=$OUT/times.jsonl rounds='' models='resnet gpt tiny' model
    [ -n "$IS_DRY" ] && rounds='--rounds 1' && models='gpt'
    step times times.txt 100 "$PYTHON" "$B/gpu.py" --record "$times" $rounds $SMALL
    step times-deterministic times.txt 100 "$PYTHON" "$B/gpu.py" --deterministic --record "$times" $rounds $SMALL
    step profile profile.txt 120 "$PYTHON" "$B/gpu_profile.py" --trace "$OUT/trace.json.gz" \
        ${IS_DRY:+--models gpt} $SMALL
    step memory memory.txt 90 "$PYTHON" "$B/gpu_memory.py" ${IS_DRY:+--models gpt} $SMALL
    # Compilers fill their cache side by side, so that the timed runs, one at a time, find it filled.
    step fill-cache times.txt 150 bash -c "$FILL_CACHE" fill-cache "$models" "$PYTHON" "$B/gpu.py" $SMALL
    for model in $models; do
        step "compiled-$model" times.txt 70 "$PYTHON" "$B/gpu.py" --models "$model" --compile --record "$times" \
            $rounds $SMALL
    done
    for model in $models; do
        step "compiled-det-$model" times.txt 70 "$PYTHON" "$B/gpu.py" --models "$model" --compile --deterministic \
            --record "$times" $rounds $SMALL
    done
    step goals times.txt 20 "$PYTHON" "$B/gpu.py" --summary "$times" $SMALL
}

for part in $PARTS; do
    SECONDS=0
    "$part"
done
[ -z "$HAS_FAILED" ]
