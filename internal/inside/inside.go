// Package inside connects a public type with its internals, which other packages of Chorus use and
// users do not see.
//
// The public type embeds a [Ref], by an alias that is not exported, so neither the field nor its
// method is visible. Code that has a public value calls [Of], which infers the type of the internals
// from the method that the Ref promotes.
//
// Of costs a call through the method table of an interface, because the compiler does not inline such a call in
// generic code. The three bridges that each operation and each allocation crosses several times
// (gpu.StreamOf, gpu.DeviceOf and the buffers of package mem) therefore are not generic.
package inside

// A Ref holds the internals of the public value that embeds it. The zero Ref holds the zero T.
type Ref[T any] struct{ value T }

// New returns a Ref with the given internals.
func New[T any](value T) Ref[T] { return Ref[T]{value} }

func (r *Ref[T]) inside() *T { return &r.value }

// A Has is a pointer to a public value whose internals are a T.
type Has[T any] interface{ inside() *T }

// Of returns the internals of a public value, in place.
func Of[T any](x Has[T]) *T { return x.inside() }
