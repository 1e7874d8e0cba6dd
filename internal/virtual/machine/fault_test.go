package machine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// FuzzFaults reads fault plans.
func FuzzFaults(f *testing.F) {
	f.Add("cuMemAllocAsync#3=CUDA_ERROR_OUT_OF_MEMORY, hang@ncclAllReduce#2")
	f.Add("wrong@ncclAllReduce#3, slow@cuMemcpyDtoDAsync#*=200ms, slow@ncclSend#1=-1s, wrong@cuInit#1")
	f.Add("async@x#*=ncclSystemError,@#=")
	f.Fuzz(func(t *testing.T, s string) { _ = new(faultPlan).Parse(s) })
}

// A fault of a device has its own count, and faults of all devices count all calls.
func TestFaultsOfDevices(t *testing.T) {
	var p faultPlan
	require.NoError(t, p.Parse("slow@ncclSend:1#2=3s, wrong@cublasLtMatmul:0#*, cuLaunchKernel:2#*=CUDA_ERROR_LAUNCH_FAILED, hang@ncclSend#4"))
	require.True(t, p.Scoped())
	require.Zero(t, p.NextOn("ncclSend", 1))
	require.Zero(t, p.NextOn("ncclSend", 0), "the second call, and the first of device 0")
	require.Equal(t, 3*time.Second, p.NextOn("ncclSend", 1).Slow)
	require.True(t, p.NextOn("ncclSend", 0).Hang, "the fourth call of all devices")
	require.Zero(t, p.NextOn("ncclSend", 1), "the third call of device 1")
	for range 2 {
		require.True(t, p.NextOn("cublasLtMatmul", 0).Wrong)
		require.Zero(t, p.NextOn("cublasLtMatmul", 1))
		require.Zero(t, p.Next("cublasLtMatmul"), "a call without a device")
	}
	require.EqualValues(t, 719, p.NextOn("cuLaunchKernel", 2).Status)
	require.Zero(t, p.NextOn("cuLaunchKernel", 0))
	var plain faultPlan
	require.NoError(t, plain.Parse("hang@ncclSend#1"))
	require.False(t, plain.Scoped())
	for text, want := range map[string]string{
		"hang@ncclSend:x#1":                              `"x" is not the number of a device`,
		"hang@ncclSend:-1#1":                             `"-1" is not the number of a device`,
		"hang@ncclSend:01#1":                             `"01" is not the number of a device`,
		"cuInit:0#1=CUDA_ERROR_NO_DEVICE":                `"cuInit" is not a call on one device`,
		"ncclGetUniqueId:0#1=ncclSystemError":            `"ncclGetUniqueId" is not a call on one device`,
		"wrong@cublasGemmEx:0#1":                         "neither a copy",
		"cuLaunchKernel:0#1=CUDA_ERROR_LAUNCH_IMAGINARY": "is not a failure",
	} {
		require.ErrorContains(t, new(faultPlan).Parse(text), want)
	}
}
