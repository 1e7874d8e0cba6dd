// Package gpu has the mechanisms that Chorus's packages share and that users do not see:
// contexts, raw streams and events, the captures that have begun, and host callbacks. Each
// of these mechanisms is implemented only here.
//
// The public types of packages device and stream are façades: each embeds a reference to
// its type in this package, and functions such as [DeviceOf] and [SystemOf] return that
// type. The methods behind these functions are unexported, so users of the public types
// neither see nor call them.
package gpu
