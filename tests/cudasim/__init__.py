"""A GPU in Python: runs the CUDA kernels, unmodified, thread by thread, and finds what a sanitizer would.

Numba's own simulator cannot run kernels that address memory by integers through PTX statements and work in warps. This
one can:

* kernels.py loads private copies of the kernel modules, in which `numba.cuda` and cuda_ptx.py are stand-ins;
* ptx.py turns every statement of cuda_ptx.py into Python, instruction by instruction: a new statement of known
  instructions needs nothing here, a new instruction one line of its table;
* threads.py runs the threads of a block as greenlets that meet at barriers and at the warp's joint instructions;
* memory.py and access.py keep global and shared memory, where every access is checked: bounds, alignment, races;
* order.py knows which stores a load may rely on: barriers, fences, atomics, dependent launches;
* warp.py has the joint instructions: shuffles, ldmatrix, mma;
* driver.py stands in for the CUDA driver and cuBLAS, so that the launching code runs unmodified too.

Integers are Python's, cut to size where a kernel casts them and where an instruction takes them (Numba computes with
64 bits in between); floats are numpy's float32.
"""
