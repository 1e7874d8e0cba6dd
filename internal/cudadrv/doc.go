// Package cudadrv is the CUDA driver API: one method for each C function that Chorus uses,
// with the C names without their cu prefix, C types and no policy.
//
// Driver is the interface that the layers above program against. Lib calls libcuda.so.1;
// the virtual devices implement the same interface in host memory. In-parameters are
// passed by value, and out-parameters are returned as results, before the Result. CUDA
// defines which calls need a current context on the calling OS thread; the layers above
// bind one for every call that the interface does not mark as free of a context.
package cudadrv
