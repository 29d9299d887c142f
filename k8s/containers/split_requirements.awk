# Splits the output of `uv pip compile`: torch and its GPU packages go to the file `cuda`, all others to the file `common`.
/^[^ ]/ { file = $0 ~ /^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/ ? cuda : common }
!(file in begun) { print "# Written by `make image-lock`." > file; begun[file] = 1 }
{ print > file }
