package fault

import "testing"

// FuzzFaults reads fault plans.
func FuzzFaults(f *testing.F) {
	f.Add("cuMemAllocAsync#3=CUDA_ERROR_OUT_OF_MEMORY, hang@ncclAllReduce#2")
	f.Add("wrong@ncclAllReduce#3, slow@cuMemcpyDtoDAsync#*=200ms, slow@ncclSend#1=-1s, wrong@cuInit#1")
	f.Add("async@x#*=ncclSystemError,@#=")
	f.Fuzz(func(t *testing.T, s string) { _ = new(Plan).Parse(s) })
}
