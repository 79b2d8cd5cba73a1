"""Private convex learning for tables: noisy AdaGrad, DP gradient descent, and estimators."""

from dpspan.convex.linear_regression import PrivateLinearRegression as PrivateLinearRegression
from dpspan.convex.linear_svc import PrivateLinearSVC as PrivateLinearSVC
from dpspan.convex.logistic_regression import PrivateLogisticRegression as PrivateLogisticRegression
from dpspan.convex.losses import Huber as Huber
from dpspan.convex.losses import Logistic as Logistic
from dpspan.convex.losses import SmoothedHinge as SmoothedHinge
from dpspan.convex.losses import Squared as Squared
from dpspan.convex.methods import GradientDescent as GradientDescent
from dpspan.convex.methods import NoisyAdaGrad as NoisyAdaGrad
from dpspan.convex.oracles import Everything as Everything
from dpspan.convex.oracles import GivenBasis as GivenBasis
from dpspan.convex.oracles import PublicFeatures as PublicFeatures
from dpspan.convex.oracles import PublicGradients as PublicGradients
from dpspan.convex.preconditioners import FromNoisyGradients as FromNoisyGradients
from dpspan.convex.preconditioners import Released as Released
from dpspan.convex.preconditioners import ReleasedSecondMoment as ReleasedSecondMoment
from dpspan.convex.public_rows import PublicRows as PublicRows
from dpspan.convex.public_rows import without_public as without_public
from dpspan.convex.scaling import FeatureBounds as FeatureBounds
from dpspan.convex.scaling import PublicScaling as PublicScaling
from dpspan.convex.schedules import ConstantClip as ConstantClip
from dpspan.convex.schedules import Envelope as Envelope
from dpspan.convex.schedules import GivenClips as GivenClips
