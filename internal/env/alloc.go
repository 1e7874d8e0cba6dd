package env

// What the allocators are told.
var (
	AllocConf = &Var{"CHORUS_ALLOC_CONF", "text", "",
		"The allocators' options in torch's form, such as `max_split_size_mb:128,expandable_segments:True`; a mistake is an error of the first allocation. `backend:cudaMallocAsync` takes memory from the driver's own pool, to which the options of the caching allocator (`backend:native`, the default) mean nothing. `release_lock_on_cudamalloc` is always so, and `graph_capture_record_stream_reuse` never: both are taken and change nothing. `memory.SetAllocatorSettings` changes the options at run time."}
	TorchAllocConf = &Var{"PYTORCH_CUDA_ALLOC_CONF", "text", "",
		"What CHORUS_ALLOC_CONF is where that is unset."}
)

var allocVars = []*Var{AllocConf, TorchAllocConf}
