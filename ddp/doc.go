// Package ddp reduces the gradients of a model over the ranks of a group while the
// backward pass still computes the others.
//
// A [Reducer] gives all ranks all gradients:
//
//	flat, grads, err := memory.MakeFlat[float32](s, 4096, 1024)
//	defer flat.Close()
//	r, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, nil)
//	defer r.Close()
//	...
//	err = r.Ready(s, i) // in the backward pass, when gradient i is enqueued
//	err = r.Finish(s)   // s sees all gradients reduced
//
// A [Sharder] keeps parameters and gradients in flat memory. Each rank updates one shard of
// it. [Units] also keep only a shard of the parameters, and gather those of a layer while it uses them.
//
// The names of other libraries:
//
//	PyTorch                        here
//	DistributedDataParallel        Reducer
//	gradient_as_bucket_view        memory.MakeFlat
//	find_unused_parameters         ReducerConfig.FindUnused
//	static_graph                   ReducerConfig.StaticGraph
//	bucket_cap_mb                  ReducerConfig.BucketBytes, ReducerConfig.Autotune
//	fp16_compress_hook             ReducerConfig.Compress
//	register_comm_hook             ReducerConfig.Hook
//	powerSGD_hook                  PowerSGD
//	quantization_pertensor_hook    Quantized
//	Join                           ReducerConfig.Uneven, Reducer.Join
//	ZeroRedundancyOptimizer        Sharder
//	fully_shard, HSDP              Units
//
// Gradients lie in buckets. A bucket is reduced on the group's stream as soon as its last
// gradient is ready on all local ranks, and buckets are reduced in the same order on all
// ranks. The host waits for nothing and allocates nothing. In a group with
// [comm.Config.Deterministic] the bits of reduced gradients do not depend on the buckets.
//
// [Autotune] chooses the size of the buckets, or the prefetch of Units, and the priority, strategy and number of multiprocessors
// of collectives by the times of the first steps:
//
//	fast, err := comm.Join(ctx, g.Session(), dev, &comm.Config{HighPriority: true})
//	r, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{Autotune: &ddp.Autotune{Groups: []*comm.Group{fast}}})
//	...
//	for _, m := range r.Measurements() { // nil until the choice
//		fmt.Println(m, m.Step)
//	}
//
// An error that matches [comm.ErrMismatch] is the error of a wrong argument. When the group
// is broken, every later call returns an error that matches [comm.ErrBroken].
package ddp
