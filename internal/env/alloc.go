package env

// What the allocators are told.
var (
	AllocConf = &Var{"CHORUS_ALLOC_CONF", "text", "",
		"The allocators' options in torch's form, such as `max_split_size_mb:128,expandable_segments:True`; a mistake is an error of the first allocation. Memory comes from the driver's allocator (`backend:cudaMallocAsync`), to which the options of torch's own (`native`) mean nothing."}
	TorchAllocConf = &Var{"PYTORCH_CUDA_ALLOC_CONF", "text", "",
		"What CHORUS_ALLOC_CONF is where that is unset."}
)

var allocVars = []*Var{AllocConf, TorchAllocConf}
