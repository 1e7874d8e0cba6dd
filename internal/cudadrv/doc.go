// Package cudadrv is the CUDA driver API: one method for each C function that
// Chorus uses, with the C names less their cu prefix, C widths and no policy.
//
// Driver is the interface that the layers above program against. Lib calls
// libcuda.so.1; the virtual devices implement the same interface in host
// memory. In-parameters are passed by value and out-parameters come back as
// results, before the Result. Which of the calls need a current context on the
// calling OS thread is what CUDA says of them; the layers above bind one for
// every call that is not listed as free of a context in the interface.
package cudadrv
