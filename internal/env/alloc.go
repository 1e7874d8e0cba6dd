package env

// Configuration of the allocators.
var (
	AllocConf = &Var{"CHORUS_ALLOC_CONF", "text", "",
		"Options of the allocators in torch's format, such as `max_split_size_mb:128,expandable_segments:True`. An invalid value is an error of the first allocation. `backend:cudaMallocAsync` allocates from the driver's pool, which ignores the options of the caching allocator (`backend:native`, the default). `release_lock_on_cudamalloc` is always on and `graph_capture_record_stream_reuse` always off: both are accepted and have no effect. `memory.SetAllocatorSettings` changes options at run time."}
	TorchAcceleratorAllocConf = &Var{"PYTORCH_ALLOC_CONF", "text", "",
		"Used instead of CHORUS_ALLOC_CONF if that is unset, and before PYTORCH_CUDA_ALLOC_CONF."}
	TorchAllocConf = &Var{"PYTORCH_CUDA_ALLOC_CONF", "text", "",
		"Used instead of CHORUS_ALLOC_CONF if that is unset."}
)

var allocVars = []*Var{AllocConf, TorchAcceleratorAllocConf, TorchAllocConf}
