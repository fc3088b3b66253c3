#!/usr/bin/env bash
# The whole pipeline on the mini world, on two CPU cores: teacher data, student, retriever, adaptive RAG, scores.
# Run again, it skips what is done; a run that was stopped goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/make_venv.sh

runs=runs/quickstart
configs=configs/quickstart
python=.venv/bin/python
port=${SAMRAG_TEACHER_PORT:-8399}
teacher=(--teacher_url "http://127.0.0.1:$port/v1")
export OPENAI_API_KEY=${OPENAI_API_KEY:-not-needed-on-loopback}
export TOKENIZERS_PARALLELISM=false
started=$SECONDS

step() { printf '\n[%3d s] %s\n' "$((SECONDS - started))" "$1"; }

step "mini world"
$python scripts/make_mini_world.py --config $configs/make_mini_world.yaml
$python data_gen/prepare.py --config $configs/prepare.yaml

step "simulated teacher on port $port (a simulation: it knows the world, and errs in 15 % of its replies)"
mkdir -p $runs
rm -f $runs/teacher.port
$python scripts/simulated_teacher.py --world $runs/world --port "$port" --port_file $runs/teacher.port \
    > $runs/teacher.log 2>&1 &
teacher_pid=$!
trap 'kill $teacher_pid 2>/dev/null || true' EXIT
while [ ! -s $runs/teacher.port ]; do
    kill -0 $teacher_pid 2>/dev/null || { cat $runs/teacher.log >&2; exit 2; }
    sleep 0.2
done

step "raw captions, index of the training documents"
$python data_gen/caption.py --config $configs/caption.yaml "${teacher[@]}"
$python inference/build_index.py --config $configs/build_index.yaml \
    --documents_file $runs/data/train/documents.captioned.jsonl --output_dir $runs/index_train

step "teacher data and hard negatives"
$python data_gen/distill.py --config $configs/distill.yaml "${teacher[@]}"
$python data_gen/mine.py --config $configs/mine.yaml

step "student M -> M*"
.venv/bin/accelerate launch --cpu train/sft.py --config $configs/sft.yaml

step "retriever R -> R*"
.venv/bin/accelerate launch --cpu train/retriever.py --config $configs/retriever.yaml

step "indexes of the dev documents, and recall"
$python inference/build_index.py --config $configs/build_index.yaml
$python inference/build_index.py --config $configs/build_index.yaml \
    --embedder $runs/retriever --output_dir $runs/index_dev_tuned
$python inference/evaluate_retrieval.py --config $configs/evaluate_retrieval.yaml

step "RAG and SAM-RAG, every pair of retriever and model"
$python inference/study.py --config $configs/study.yaml "${teacher[@]}"

step "tables, plots, report"
$python inference/evaluate.py --config $configs/evaluate.yaml
step "done: $runs/report.html"
