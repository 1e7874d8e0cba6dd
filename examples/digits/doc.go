// Package digits is what the training examples share: a small classifier of
// handwritten digits, its data, and the loop over steps. How gradients come
// together and who updates which parameters is the examples' own.
package digits
