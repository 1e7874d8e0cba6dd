// The kernels of a gradient scaler, each for a single thread. The scale, its inverse and the
// growth tracker are in device memory.

// inverse_of returns the factor that unscales gradients, rounded as in torch.
static __device__ float inverse_of(float scale) { return (float)(1.0 / (double)scale); }

// update ends an iteration, as torch._amp_update_scale_ does. found has the results of count
// checks. If one of them is not 0, the scale shrinks. After interval iterations without such a
// result, it grows, unless it would overflow.
extern "C" __global__ void update(float* scale, float* inverse, int* tracker, const float* found, int count, float growth, float backoff, int interval) {
	bool bad = false;
	for (int i = 0; i < count; i++) bad |= found[i] != 0;
	if (bad) {
		*scale *= backoff;
		*tracker = 0;
	} else if (*tracker + 1 == interval) {
		const float more = *scale * growth;
		if (isfinite(more)) *scale = more;
		*tracker = 0;
	} else
		++*tracker;
	*inverse = inverse_of(*scale);
}

// put sets the scale, and the growth tracker unless steps is negative.
extern "C" __global__ void put(float* scale, float* inverse, int* tracker, float to, int steps) {
	*scale = to;
	*inverse = inverse_of(to);
	if (steps >= 0) *tracker = steps;
}
