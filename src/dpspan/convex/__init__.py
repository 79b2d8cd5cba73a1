"""Private convex learning for tables: noisy AdaGrad, DP gradient descent, and estimators."""

from dpspan.convex.estimators import PrivateLinearRegression as PrivateLinearRegression
from dpspan.convex.estimators import PrivateLinearSVC as PrivateLinearSVC
from dpspan.convex.estimators import PrivateLogisticRegression as PrivateLogisticRegression
from dpspan.convex.fitting import ConstantClip as ConstantClip
from dpspan.convex.fitting import Envelope as Envelope
from dpspan.convex.losses import Huber as Huber
from dpspan.convex.losses import Logistic as Logistic
from dpspan.convex.losses import SmoothedHinge as SmoothedHinge
from dpspan.convex.losses import Squared as Squared
from dpspan.convex.methods import GradientDescent as GradientDescent
from dpspan.convex.methods import NoisyAdaGrad as NoisyAdaGrad
from dpspan.convex.preconditioners import FromNoisyGradients as FromNoisyGradients
from dpspan.convex.preconditioners import Released as Released
from dpspan.convex.public_rows import PublicRows as PublicRows
from dpspan.convex.public_rows import without_public as without_public
from dpspan.convex.scaling import FeatureBounds as FeatureBounds
from dpspan.convex.scaling import PublicScaling as PublicScaling
from dpspan.convex.subspaces import Everything as Everything
from dpspan.convex.subspaces import PublicFeatures as PublicFeatures
from dpspan.convex.subspaces import PublicGradients as PublicGradients
from dpspan.convex.subspaces import WholeSpace as WholeSpace
from dpspan.convex.transformers import PrivateImputer as PrivateImputer
from dpspan.convex.transformers import PrivateScaler as PrivateScaler
