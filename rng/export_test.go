package rng

// For the tests beside the package.
var (
	FromHalf   = fromHalf
	FromBFloat = fromBFloat
	ToHalf     = toHalf
	ToBFloat   = toBFloat
)
