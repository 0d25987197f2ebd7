# suite.sh N WORKERS SECONDS MARK NAME
N=$1; W=$2; S=$3; MARK=$4; NAME=$5
export PYTHONPATH=src:.next
pids=
for i in $(seq 0 $((N-1))); do
  extra="-n $W --dist worksteal"; [ $W = 0 ] && extra=
  CUDA_VISIBLE_DEVICES=$i SHARD=$i/$N EPINORM_CACHE_DIR=/tmp/cache timeout -s INT $S python3 -m pytest -p shard tests/gpu -m "$MARK" $extra -q --maxfail 40 --timeout 170 -p no:cacheprovider > $OUT/$NAME$i.log 2>&1 &
  pids="$pids $!"
done
wait $pids
for i in $(seq 0 $((N-1))); do tail -1 $OUT/$NAME$i.log; grep -E "^(FAILED|ERROR)" $OUT/$NAME$i.log | head -12; done
