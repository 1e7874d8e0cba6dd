// The element-wise operations of the model. cuBLAS computes the matrix products.

// h = max(h + b, 0); b is added to each row of h.
extern "C" __global__ void bias_relu(float* h, const float* b, int rows, int cols) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * cols) h[i] = fmaxf(h[i] + b[i % cols], 0.f);
}

// z + b are the logits of row r with label y[r]. Writes scale times the gradient of the
// cross entropy to z, and the scaled sum of the losses of all rows to loss. A single
// block computes the sum, so that its order is fixed.
extern "C" __global__ void softmax_loss(float* z, const float* b, const int* y, float* loss, float scale, int rows, int cols) {
    __shared__ float sum[256];
    float mine = 0.f;
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        float* row = z + r * cols;
        float top = -3.402823466e38f, total = 0.f;
        for (int c = 0; c < cols; c++) { row[c] += b[c]; top = fmaxf(top, row[c]); }
        for (int c = 0; c < cols; c++) total += expf(row[c] - top);
        mine += logf(total) + top - row[y[r]];
        for (int c = 0; c < cols; c++) row[c] = scale * (expf(row[c] - top) / total - (c == y[r]));
    }
    sum[threadIdx.x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sum[threadIdx.x] += sum[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *loss = scale * sum[0];
}

// dh = 0 for inactive units.
extern "C" __global__ void relu_back(float* dh, const float* h, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && h[i] <= 0.f) dh[i] = 0.f;
}

// out[c] = sum of column c.
extern "C" __global__ void column_sum(float* out, const float* x, int rows, int cols) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float s = 0.f;
    for (int r = 0; r < rows; r++) s += x[r * cols + c];
    out[c] = s;
}

// Momentum SGD as in torch: v = momentum * v + g, p -= lr * v.
extern "C" __global__ void sgd(float* p, float* v, const float* g, float lr, float momentum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    v[i] = momentum * v[i] + g[i];
    p[i] -= lr * v[i];
}
