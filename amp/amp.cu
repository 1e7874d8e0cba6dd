// The arithmetic of a gradient scaler, by one thread.

// inverse is what unscaling multiplies by, rounded as torch rounds it.
static __device__ float inverse_of(float scale) { return (float)(1.0 / (double)scale); }

// update ends an iteration: found has count results of checks.
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

// put sets the scale, and the tracker unless it is negative.
extern "C" __global__ void put(float* scale, float* inverse, int* tracker, float to, int steps) {
	*scale = to;
	*inverse = inverse_of(to);
	if (steps >= 0) *tracker = steps;
}
