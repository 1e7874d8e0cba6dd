package env

// Configuration of matrix products.
var (
	CUBLASWorkspaceConfig = &Var{"CUBLAS_WORKSPACE_CONFIG", "text", "",
		"Workspace of matrix products for each stream: pairs of a size in KiB and a count, such as `:4096:8`, whose sum is allocated from the caching allocator. Default, as in torch: 32 MiB from compute capability 9.0 on, and `:4096:2:16:8` before."}
	AllowTF32 = &Var{"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "number", "0",
		"`1` makes `tensor.High` the default of `MatMulSettings.Float32Precision`, so that products of float32 use TF32. cuBLAS reads NVIDIA_TF32_OVERRIDE, whose value 0 disables TF32."}
	PreferCUBLASLt = &Var{"TORCH_BLAS_PREFER_CUBLASLT", "number", "0",
		"`1` makes `tensor.CUBLASLt` the default of `MatMulSettings.Library`. The default `tensor.AnyBLAS` also uses cuBLASLt first, but falls back to cuBLAS."}
)

var blasVars = []*Var{CUBLASWorkspaceConfig, AllowTF32, PreferCUBLASLt}
