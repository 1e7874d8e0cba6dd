// Package optim has optimisers and the arithmetic of gradients for tensors on one device:
// AdamW, Adam and SGD, norms, clipping, and the check for infinities and NaN.
//
//	params := []optim.Param{optim.Of(weights, weightGrads), optim.Of(bias, biasGrads)}
//	opt, err := optim.NewAdamW(s, []optim.Group{{Params: params}}, &optim.AdamConfig{LR: 3e-4})
//	defer opt.Close()
//	grads, err := optim.NewGrads(s, opt.Gradients()...)
//	defer grads.Close()
//
//	_, err = grads.Powers(s, 2)         // in every step, after backward
//	norm, coef, err := grads.Coef(s, 1) // what clips the norm to 1
//	err = opt.Step(s, &optim.StepConfig{Clip: coef})
//
// One kernel updates all parameters. Learning rates, step counters, norms and factors are
// in device memory, so nothing waits for the device, and a graph can capture a whole step.
// On a GPU the updates equal the updates of torch's fused optimisers, bit for bit.
//
// A graph reads the learning rate of a group (Optimizer.LR) in each launch. SetLR changes it
// between launches, and a kernel in the graph may compute a schedule.
//
// Parameters and gradients are contiguous tensors, or slices (Of). They may be allocations or
// parts of one allocation, such as the buckets of a ddp.Reducer or the parts of a ddp.Sharder.
// The program keeps them open until the optimiser is closed. If they are used on several
// streams, the program orders these streams. Gradients with other memory in each step, such as those of
// ddp.Units, are given to Optimizer.SetGradients; NewGrads is then Optimizer.Grads.
//
// The first NewAdam, NewAdamW, NewSGD or NewGrads on a device loads the kernels, and the driver may wait for all work of
// the device then. Call it before any collective that waits for a rank which is not enqueued yet.
//
// Concurrency: each optimiser and each Grads is used by one goroutine at a time.
package optim
