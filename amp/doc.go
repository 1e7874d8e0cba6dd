// Package amp has what training in half precision needs: a gradient scaler with
// torch.amp.GradScaler's semantics, and torch.autocast's policy as data.
//
//	scaler, err := amp.NewScaler(s, nil)
//	defer scaler.Close()
//
//	// In every step: the backward pass begins with scaler.Factor() instead of 1.
//	err = scaler.Step(s, opt, nil) // skips the step if a gradient is infinite or NaN
//	err = scaler.Update(s)
//
// The scale, its growth counter and what was found are in device memory: Step and Update do
// not wait for the device, and a graph can capture them. If ranks have different gradients,
// as with a ddp.Sharder, Agree tells all of them what one has found, between Unscale and
// Step. After a ddp.Reducer the gradients are the same on all ranks, and so is the result.
//
// Concurrency: each Scaler is used by one goroutine at a time.
package amp
