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
// The scale, its growth counter and the results of checks are in device memory. Therefore Step
// and Update do not wait for the device, and a graph can capture them, and Scale, Unscale, Check,
// SetScale and Agree, after the first iteration with each optimiser. A graph cannot capture
// NewScaler and State. If ranks have different
// gradients, as with a ddp.Sharder, call Unscale or Check, then Agree, and then Step, so that all
// ranks skip the same steps. After a ddp.Reducer, the gradients and the results are the same on all ranks.
//
// Concurrency: each Scaler is used by one goroutine at a time.
package amp
