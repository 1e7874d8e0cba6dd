// Package digits is shared by the training examples: a small classifier of handwritten
// digits, its data, and the training loop. The examples implement the reduction of
// gradients and the update of parameters.
package digits
