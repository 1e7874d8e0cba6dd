struct BFloat { unsigned short bits; };

static __device__ float value(BFloat x) { return __uint_as_float((unsigned)x.bits << 16); }
static __device__ BFloat rounded(float x) {
	const unsigned u = __float_as_uint(x);
	BFloat b;
	b.bits = x != x ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
	return b;
}

// attention computes causal attention: one thread for each query of each head. A row of qkv has
// the queries of all heads, then the keys, and then the values.
extern "C" __global__ void attention(const BFloat* qkv, BFloat* out, int tokens, int heads) {
	const int i = blockIdx.x * blockDim.x + threadIdx.x, head = i % heads, token = i / heads, width = heads * HEAD;
	if (token >= tokens) return;
	const BFloat* q = qkv + (long long)token * 3 * width + head * HEAD;
	float sum[HEAD] = {}, total = 0, largest = -1e30f;
	for (int t = 0; t <= token; t++) {
		const BFloat *k = qkv + (long long)t * 3 * width + width + head * HEAD, *v = k + width;
		float score = 0;
		for (int d = 0; d < HEAD; d++) score += value(q[d]) * value(k[d]);
		score *= rsqrtf((float)HEAD);
		const float most = fmaxf(largest, score), old = expf(largest - most), weight = expf(score - most);
		for (int d = 0; d < HEAD; d++) sum[d] = sum[d] * old + weight * value(v[d]);
		total = total * old + weight;
		largest = most;
	}
	for (int d = 0; d < HEAD; d++) out[(long long)token * width + head * HEAD + d] = rounded(sum[d] / total);
}
