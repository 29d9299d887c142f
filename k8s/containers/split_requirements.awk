# Deals the entries of `uv pip compile` out: what torch brings for GPUs to the file `cuda`, all else to the file `common`.
/^[^ ]/ { file = $0 ~ /^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/ ? cuda : common }
!(file in begun) { print "# Written by `make image-lock`." > file; begun[file] = 1 }
{ print > file }
